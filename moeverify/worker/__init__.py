"""Jobs that run on the ranks: verify, diagnose, make goldens, save and load.

`moeverify.controller` starts them.
"""

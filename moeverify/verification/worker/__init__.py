"""Jobs that run on the ranks: verify, diagnose, make goldens, save and load.

`moeverify.verification.controller` starts them.
"""

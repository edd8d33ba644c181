import a_package_that_is_not_there  # noqa: F401


def make():
    return None

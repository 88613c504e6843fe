"""The base of errors that are the user's to mend."""


class UserError(Exception):
    """A wrong input from outside: a flag, a file, a missing package.

    The message is one line that says what is wrong and how to mend it; scripts print it without a traceback.
    """

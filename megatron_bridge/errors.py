"""The one exception for mistakes that the user of a run can mend.

Everything a configuration, a checkpoint folder or a data file can get wrong is raised as `UserError`; defects of the
program itself stay ordinary exceptions, so that whoever reports an error can print the first without a traceback.
"""


class UserError(Exception):
    """A mistake in what the user supplied: `where` names the key, file or row, `message` says what is wrong."""

    def __init__(self, where: object, message: str) -> None:
        super().__init__(f"{where}: {message}")
        self.where = str(where)
        self.message = message

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, str]]:
        return type(self), (self.where, self.message)


class SyncError(RuntimeError):
    """A transfer did not arrive whole: what it wrote to may hold old and new weights, and must not be used."""

"""The command line that runs a module in this Python, without the working directory on its path.

`python -m` puts the working directory in front of the path (`-P` turns that off). A folder `headrace` there, such as a
clone, would take the place of an editable installation, which Python asks last; and a file `pip.py` of a repository
whose tasks are made would run on this machine. Folders on PYTHONPATH stay.
"""

import sys


def module_command(module: str, *words: str) -> list[str]:
    """The command line of `python -P -m module words...`."""
    return [sys.executable, "-P", "-m", module, *words]

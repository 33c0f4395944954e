"""Makes the tasks' image as a root file system: a shell and one script.

    python examples/own/image.py FOLDER [BUSYBOX]
    headrace images FOLDER --name own-app

BUSYBOX is a static busybox; Debian's package busybox-static has it at /bin/busybox. Any image that docker, buildah or
`headrace images` makes does as well.
"""

import shutil
import sys
from pathlib import Path

APPLETS = ("sh", "cat", "cp", "echo", "grep", "ls", "mkdir", "rm", "sed", "test")


def make(folder: Path, busybox: Path) -> None:
    """Write the root file system into a new folder."""
    programs, app = folder / "bin", folder / "app"
    programs.mkdir(parents=True)
    app.mkdir()
    shutil.copyfile(busybox, programs / "busybox")
    (programs / "busybox").chmod(0o755)
    for name in APPLETS:
        (programs / name).symlink_to("busybox")
    (app / "say.sh").write_text("echo nothing\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(*sys.argv[2:3] or ["/bin/busybox"]))

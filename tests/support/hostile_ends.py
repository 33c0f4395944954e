"""End states that a candidate may leave in its sandbox: programs, drawn from a list of parts by a seed.

A state is one to three parts, run one after another by the sandbox's own Python in the workspace; a part that fails is
skipped. Parts of `FOLDER` stay in the workspace and in the processes that they start.
"""

import random
import tarfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.archives import Members, docker_save

_FOLDER = r'''
# sparse files
for n in range(12): os.truncate(os.open(f's{n}', os.O_CREAT | os.O_RDWR), 16 << 20)
# a huge sparse file
os.truncate(os.open('huge', os.O_CREAT | os.O_RDWR), 1 << 40)
# a sparse file with data at its end
fd = os.open('e', os.O_CREAT | os.O_RDWR); os.pwrite(fd, b'x', 1 << 33)
# a large file
open('large', 'wb').write(os.urandom(1 << 20) * 20)
# many files
os.mkdir('many')
for n in range(4000): open(f'many/{n}', 'w')
# many long names
os.mkdir('long')
for n in range(4000): open('long/' + f'{n:0>255}', 'w')
# a deep tree
for n in range(1500): os.mkdir('d'); os.chdir('d'); open('f', 'w')
os.chdir(HOME)
# a path over PATH_MAX
for n in range(40): os.mkdir('p' * 250); os.chdir('p' * 250); open('f', 'w')
os.chdir(HOME)
# strange names
for b in range(1, 256):
 if b != 47: open(b'n' + bytes([b]), 'w')
# names of control characters
open('\x01' * 255, 'w').write('1'); os.mkdir('\n' * 250)
# names that look like others
for n in ('..x', '...', '-rf', '--', '.git ', '.GIT', '~', '*', '$(id)'): os.mkdir(n); open(n + '/f', 'w')
# surrogates
for n in (b'\xed\xa0\x80', b'\xff\xfe', b'\xc3', '\u202e'.encode()): open(n, 'w').write('s')
# loops of links
os.symlink('l2', 'l1'); os.symlink('l1', 'l2'); os.symlink('.', 'me'); os.symlink('..', 'up')
# links out
for n, t in enumerate(('/', '/etc/passwd', '/proc/self/mem', '/dev/zero', '../' * 40)): os.symlink(t, f'o{n}')
# long link targets
for n in range(50): os.symlink('t' * 4000, f't{n}')
# hard links
open('h', 'w').write('h')
for n in range(500): os.link('h', f'h{n}')
# pipes and sockets
import socket; os.mkfifo('pipe'); s = socket.socket(socket.AF_UNIX); s.bind('sock'); os.mkfifo('test_x.py')
# device nodes
os.mknod('zero', 0o20666, os.makedev(1, 5)); os.mknod('whiteout', 0o20666, 0)
# no permissions
os.mkdir('x'); open('x/f', 'w'); open('y', 'w'); os.chmod('x', 0); os.chmod('y', 0)
# set-user-id
open('suid', 'w'); os.chmod('suid', 0o6777); os.chmod('.', 0o7777)
# attributes
open('a', 'w'); os.setxattr('a', 'user.x', b'v' * 1000); os.setxattr('a', 'user.y', b'')
# access lists
open('acl', 'w')
acl = bytes.fromhex('0200000001000600ffffffff04000400ffffffff20000400ffffffff')
os.setxattr('acl', 'system.posix_acl_access', acl)
# an immutable file
import fcntl
fd = os.open('imm', os.O_CREAT | os.O_RDWR)
fcntl.ioctl(fd, 0x40086602, (0x10).to_bytes(8, 'little'))
# an append-only folder
import fcntl
os.mkdir('app')
open('app/f', 'w')
fcntl.ioctl(os.open('app', os.O_RDONLY), 0x40086602, (0x20).to_bytes(8, 'little'))
# a mount
os.mkdir('m'); libc.mount(b't', b'm', b'tmpfs', 0, b'size=1m'); open('m/f', 'w').write('m')
# a mount on the workspace
libc.mount(b't', HOME.encode(), b'tmpfs', 0, b'size=1m')
# locks
import fcntl; f = open('locked', 'w'); fcntl.flock(f, 2); fcntl.lockf(f, 2); stay()
# a lease
import fcntl, signal
signal.signal(signal.SIGIO, signal.SIG_IGN)
f = open('leased', 'w')
fcntl.fcntl(f, 1024, 1)
stay()
# a deleted open file
f = open('gone', 'wb'); f.write(bytes(4 << 20)); f.flush(); os.unlink('gone'); stay()
# a writer
background('while 1: open("w", "w").write("x" * random.randrange(1 << 20))')
# a file that grows and shrinks
background("""
fd = os.open("g", 66)
while 1: os.ftruncate(fd, random.randrange(1 << 22))
""")
# folders that come and go
background("""
while 1:
 for n in range(9): os.mkdir(f"c{n}"); open(f"c{n}/f", "w")
 for n in range(9): os.unlink(f"c{n}/f"); os.rmdir(f"c{n}")
""")
# a folder that becomes a link
background("""
while 1:
 os.mkdir("z"); os.rmdir("z"); os.symlink("/", "z"); os.unlink("z")
""")
# hogs
for n in range(6): background('while 1: pass')
# stopped processes
import signal
for n in range(4): background('import signal; os.kill(os.getpid(), signal.SIGSTOP)')
# zombies
background("""
for n in range(20):
 if not os.fork(): os._exit(0)
while 1: time.sleep(9)
""")
# a fork loop
background("""
while 1:
 try:
  if not os.fork(): os.setsid()
 except OSError: time.sleep(0.2)
""")
# low limits
import resource
for n in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC): resource.setrlimit(n, (1, 1))
# limits of the agent
import resource
for n in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_CPU): resource.prlimit(AGENT, n, (1, 1))
# a slow agent
os.sched_setscheduler(AGENT, 5, os.sched_param(0)); os.setpriority(0, AGENT, 19)
# a killed agent
os.kill(AGENT, 9)
# an agent that the kernel prefers to kill
open(f'/proc/{AGENT}/oom_score_adj', 'w').write('1000')
# signals to all
background("""
import signal
for s in range(1, 32):
 if s not in (9, 19): os.kill(AGENT, s)
os._exit(0)
""")
# an empty workspace
os.system('rm -rf ./* ./.[!.]*')
# no workspace
os.system('rm -rf ' + HOME)
# a workspace that is a file
os.rename(HOME, HOME + '.old'); open(HOME, 'w').write('now a file')
# a workspace that is a link
os.rename(HOME, HOME + '.old'); os.symlink(HOME + '.old', HOME)
# a closed workspace
os.chmod(HOME, 0)
# files of others
os.chown('.', 12345, 12345); open('f', 'w'); os.chown('f', 12345, 12345); os.chmod('f', 0)
# a broken repository
os.makedirs('.git/objects')
open('.git/HEAD', 'wb').write(bytes(9))
open('.git/index', 'wb').write(os.urandom(999))
os.mkfifo('.git/config')
# a repository that is a file
open('.git', 'w').write('gitdir: /')
# a file where the tests lie
open('tests', 'w').write('no folder'); os.makedirs('test_a.py/x')
'''

_MACHINE = r'''
# a full workspace
fill('.')
# a full /tmp
fill('/tmp')
# full everywhere
fill('.'); fill('/tmp'); fill('/dev/shm')
# no inodes
os.mkdir('i')
for n in range(200000): open(f'i/{n}', 'w').close()
# no inodes in /tmp
for n in range(200000): open(f'/tmp/{n}', 'w').close()
# no memory
x = []
while 1: x.append(bytearray(1 << 20))
# no memory, in the background
background("""
x = []
while 1: x.append(bytearray(1 << 20))
""")
# full and no memory
fill('/dev/shm'); fill('.'); background("""
x = []
while 1: x.append(bytearray(1 << 18))
""")
# signals to every process
os.kill(-1, 9)
# another clock
time.clock_settime(0, 1e9); libc.adjtimex(bytes(208))
# a reboot
libc.reboot(0x1234567); libc.syscall(169, 0xfee1dead, 672274793, 0x4321fedc, 0)
# kernel triggers
open('/proc/sysrq-trigger', 'w').write('c')
# kernel settings
for n in ('kernel/panic', 'kernel/pid_max', 'fs/file-max'): open('/proc/sys/' + n, 'w').write('1')
# control groups
os.system('mount -t cgroup2 c /tmp; echo 0 > /sys/fs/cgroup/cgroup.procs')
os.system('echo 1 > /sys/fs/cgroup/cgroup.kill; echo 1 > /tmp/cgroup.kill')
# unmounted
for n in ('/tmp', '/proc', '/dev/shm', '/workspace', '/'): libc.umount2(n.encode(), 2)
# a preloaded library
open('/etc/ld.so.preload', 'w').write('/no/such.so')
# another interpreter
os.system('rm -rf /usr/bin/python3* /bin/sh /bin/busybox /lib64')
# no users
os.system('rm -f /etc/passwd /etc/group; mkdir /etc/passwd')
# no root
os.system('rm -rf /* 2>/dev/null')
# many descriptors
import resource
for n in range(30): background("""
import socket; x = [socket.socketpair() for n in range(500)]
while 1: time.sleep(9)
""")
# long paths everywhere
os.chdir('/tmp')
for n in range(300): os.mkdir('q' * 200); os.chdir('q' * 200)
'''


def _parts(text: str) -> dict[str, str]:
    """Programs by the names in the comments before them."""
    named = (part.partition("\n") for part in text.strip().removeprefix("# ").split("\n# "))
    return {name: code for name, _, code in named}


FOLDER = _parts(_FOLDER)
"""Parts that stay in the workspace and in processes."""
MACHINE = _parts(_MACHINE)
"""Parts for a sandbox that shares no disk, memory or clock with the host."""

_PRELUDE = """
import ctypes, os, random, sys, time
libc, HOME, AGENT = ctypes.CDLL(None), os.getcwd(), os.getppid()
while AGENT > 1 and b'local' b'.main' not in open(f'/proc/{AGENT}/cmdline', 'rb').read():
    AGENT = int(open(f'/proc/{AGENT}/stat').read().rpartition(')')[2].split()[1])
assert HOME in ('/work', '/workspace') or '/headrace-' in HOME, HOME
def background(code):
    if os.fork():
        return
    try:
        if os.fork():
            os._exit(0)
        os.setsid()
        null = os.open('/dev/null', os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        while True:
            try:
                exec(code, globals())
                time.sleep(60)
            except Exception:
                time.sleep(0.01)
    finally:
        os._exit(0)
def stay():
    if os.fork() == 0:
        os.setsid()
        null = os.open('/dev/null', os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        while True:
            time.sleep(60)
def fill(folder):
    with open(folder + '/full', 'wb', 0) as file:
        while True:
            try:
                file.write(bytes(1 << 16))
            except OSError:
                return
for code in PARTS:
    try:
        os.chdir(HOME)
        exec(code, globals())
    except Exception as error:
        print(type(error).__name__, error)
"""


def states(count: int, machine: bool, seed: int = 43) -> Iterator[tuple[str, str]]:
    """Names and programs of end states. machine: whether the sandbox has a disk and memory of its own. Every part alone
    comes first, then combinations."""
    parts = FOLDER | (MACHINE if machine else {})
    draw = random.Random(seed)
    for number in range(count):
        if number < len(parts):
            chosen = [list(parts)[number]]
        else:
            chosen = draw.sample(list(parts), draw.choice((2, 2, 3)))
        yield " + ".join(chosen), program(*(parts[name] for name in chosen))


def program(*parts: str) -> str:
    """A program of the sandbox's Python that runs these parts."""
    return f"PARTS = {list(parts)!r}\n{_PRELUDE}"


def python_image(base: Path, place: Path, tag: str, user: str) -> Path:
    """An image with Python and busybox, from the files of a guest's root. user: its programs' user."""
    members: Members = [entry for entry in _cpio(base / "light.cpio") if not entry[0].name.startswith(("dev/", "sys/"))]
    owner = {"uid": 1000, "gid": 100} if user else {}
    made = tarfile.TarInfo("work")
    made.type, made.mode, made.uid, made.gid = tarfile.DIRTYPE, 0o755, owner.get("uid", 0), owner.get("gid", 0)
    users = tarfile.TarInfo("etc/passwd")
    line = b"root:x:0:0::/root:/bin/sh\ndev:x:1000:100::/work:/bin/sh\n"
    users.size, users.mode = len(line), 0o644
    rest = [entry for entry in members if entry[0].name not in ("work", "etc/passwd")]
    return docker_save(
        place / f"{tag}.tar", [[*rest, (made, b""), (users, line)]], [f"{tag}:1"], User=user, WorkingDir="/work"
    )


def _cpio(path: Path) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """The entries of an archive in the new ASCII format (cpio(5))."""
    data, at = path.read_bytes(), 0
    while data[at : at + 6] == b"070701":
        fields = [int(data[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        mode, size, length = fields[1], fields[6], fields[11]
        name = data[at + 110 : at + 109 + length].decode()
        start = (at + 110 + length + 3) & ~3
        at = (start + size + 3) & ~3
        if name == "TRAILER!!!":
            return
        entry = tarfile.TarInfo(name.strip("/"))
        entry.mode, kind = mode & 0o7777, mode >> 12
        if kind == 0o4:
            entry.type = tarfile.DIRTYPE
        elif kind == 0o12:
            entry.type, entry.linkname = tarfile.SYMTYPE, data[start : start + size].decode()
        elif kind == 0o10:
            entry.size = size
        else:
            continue
        if entry.name not in ("", "."):
            yield entry, data[start : start + size] if kind == 0o10 else b""

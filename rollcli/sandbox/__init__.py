"""Runs model-written programs where they can reach nothing: see `session.run`, the one way in.

    reward process ──exec──▶ guest ──fork──▶ answer    the model's code; confined
      verdicts                  └─────fork──▶ checker   tests of the data set; confined; asks `answer` over a socket

One start serves all tests of an answer. What must hold, and what holds it:

    reading the host, writing it    Landlock: only Python's own tree, its libraries and one temporary folder exist
    network                         seccomp: no socket can be made
    processes                       seccomp refuses forks when one process is allowed, else RLIMIT_NPROC under a uid
                                    of the program's own, for the limit does not bind root
    signals, ptrace, /proc          seccomp, Landlock's signal scope, another uid
    memory, CPU, file size          rlimits
    disk                            a tmpfs of the allowed size; where none can be mounted the folder is read only
    output, wall time               the guest reads so many bytes and no more, and kills at the deadline
    nothing survives                a pid namespace, or a single process, killed by its parent's death as well
    the verdict                     standard output is compared by the reward process; asserts run in `checker`,
                                    another process, so expected values never are where the model's code is

bubblewrap goes around all that where it is installed; Landlock may then be missing. What remains: bugs of the kernel;
the names and sizes (never the content) of host files, where bubblewrap is missing; tests that trust what only the
answer defines, such as `assert answer.is_right()`.
"""

"""What a rank finds as it begins; nothing of shoal is imported for it."""

import os
import sys


def what_is_loaded() -> tuple[bool, int, dict[str, str], int]:
    native, n_threads = "shoal._native" in sys.modules, len(os.listdir("/proc/self/task"))
    return native, hash("a string"), dict(os.environ), n_threads

"""`python -m tests.support.failing_gpu_server serve ...`: a real server on a real GPU 0 that fails for good on request.

Once the file exists that the environment names, a kernel writes to an address that is not there, in the context of the server.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from headrace.__main__ import main
from headrace.runtimes.cuda.driver import current, load

from tests.support.lost_gpu_cases import FILE

COMMAND = (sys.executable, "-m", "tests.support.failing_gpu_server")
_KERNEL = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry fail()
{
    .reg .b32 %value;
    .reg .b64 %address;
    mov.u32 %value, 1;
    mov.u64 %address, 0;
    st.global.u32 [%address], %value;
    ret;
}
"""


def fail() -> None:
    """Wait for the file, then make every later call of GPU 0 in this process fail."""
    path = Path(os.environ[FILE])
    while not path.exists():
        time.sleep(0.02)
    driver = load()
    with current(0):
        kernel = driver.module_from_buffer(_KERNEL).get_function("fail")
        with suppress(driver.Error):
            kernel(block=(1, 1, 1), grid=(1, 1))
            driver.Context.synchronize()
            os._exit(70)  # the GPU works on


if __name__ == "__main__":
    threading.Thread(target=fail, daemon=True).start()
    sys.exit(main())

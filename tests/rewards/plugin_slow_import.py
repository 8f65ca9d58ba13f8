"""A reward file that never finishes importing."""

import time

time.sleep(600)

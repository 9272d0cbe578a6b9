"""`python -m eagle3_jax` is the `eagle3` command."""

import sys

from eagle3_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m dmuon_megatron.cli`, the same as the command `dmuon-megatron`."""

import sys

from dmuon_megatron.cli import main

sys.exit(main())

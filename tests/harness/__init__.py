"""Plain helpers for tests on real Megatron: ranks, a tiny GPT, a training loop and a reference.

A test module imports what it needs from the submodules.  Only ``ranks`` may be imported into the
test process itself without the emulation; the rest runs inside ranks.
"""

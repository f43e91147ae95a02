"""Plain helpers for tests on real Megatron: ranks, a tiny GPT, a training loop and a reference.

A test module imports ``ranks``, ``types`` and ``compare`` at its top.  The others need the
emulation and Megatron, which only ranks have: import them within the function that a rank runs.
"""

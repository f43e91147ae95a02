"""Home of the GPU kernels, written in TileLang; installed as `dmuon_megatron.kernels`.

No kernel is here yet: orthogonalisation runs on torch's own matrix products. What will live here
are the symmetric products of Newton-Schulz in Gram space, one module a kernel with its
configurations and its reference in torch.
"""

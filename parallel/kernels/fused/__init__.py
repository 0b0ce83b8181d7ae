"""Triton kernels: one pass over memory where torch's operators take several. Only who has triton imports them.

All is computed in fp32 (fp64 for fp64) and rounded once, where it is stored. No result depends on the order in which
programs run, so that all repeat bitwise.
"""

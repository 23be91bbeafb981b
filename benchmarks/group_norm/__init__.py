"""GroupNorm of each client's own in one kernel each way, with its ReLU. Not part of the library: no GPU has run it.

Why it may pay: ResNet-18's step takes 28.5 ms on an H200, 12.7 of them convolutions. By bytes alone GroupNorm and ReLU
need two passes forward and three back, under 3 ms at the speed of a copy. It is more exact too:
under `vmap` torch keeps a group's mean and deviation in bf16, and that puts gradients off by two per cent (which no
accuracy has shown so far: GN-CNN on digits ends alike in float32, in bf16 and with these, four seeds on a CPU).

Checked without a GPU: the kernels in Triton's interpreter, the layers against float64 (`tests/test_group_norm.py`).
`tune_norm.py` checks and times them on a GPU. If they pay, the three files belong into `fedblur/kernels`.
"""

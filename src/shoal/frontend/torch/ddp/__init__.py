"""`shoal.torch.DistributedDataParallel`: torch's wrapper, with shoal averaging the gradients.

`wrapper` is torch's own class with another reducer; `keeper` knows when a backward pass begins and
ends and which gradients are ready; `buckets` and `averaged` are the two ways to average them.
"""

"""The processes that train one model together, and the only place that knows torch.distributed."""

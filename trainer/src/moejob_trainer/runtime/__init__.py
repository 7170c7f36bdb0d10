"""A process of the run apart from training: environment, device, heartbeats, fencing, stop, start timing."""

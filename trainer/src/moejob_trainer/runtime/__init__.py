"""A process of the run apart from training: environment, device, volume, heartbeats, fencing, stop, start timing."""

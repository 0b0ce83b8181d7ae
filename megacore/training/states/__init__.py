"""The optimizer, and where its masters and moments are: on the device, in host memory or in a file."""

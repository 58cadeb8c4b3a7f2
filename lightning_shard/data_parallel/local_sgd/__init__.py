"""Local SGD: ranks train by themselves and average parameters, not gradients, now and then."""

"""The torch side: optimizer wrapper, gradients of parameters, modules."""

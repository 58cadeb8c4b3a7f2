"""Says whether a module trains under a strategy as it does on one device, and if not, why.

records     what a run leaves: each step's outputs, loss, gradients, weights, buffers, logs
recorder    the callback that writes records
batches     the ranks' batches, joined into one device's and taken apart again
runs        the module on one device, and on ranks inside this process
comparison  two runs, and the first thing in which they differ
causes      why: by experiments, each of which changes one thing and runs again
verdict     what is told
prove       all of it
"""

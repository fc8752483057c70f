"""The command `explain`: what one recorded step of a run did to the weights, and why.

command.py            parse the arguments, start the workers, write runs/<name>/explain_<N>.json
explanation.py        measure the step: groups, signal-to-noise, tokens, blame
gradients.py          gradients of parts of a batch, measured inside the workers
"""

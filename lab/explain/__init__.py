"""The command `explain`: what one recorded step of a run did to the weights, and why."""

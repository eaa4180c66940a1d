"""The agent of a node: it alone starts and stops the local rank, so that all ranks of a pipeline live and die as one.

The protocol is pure (`messages`, `contact`, `progress`, `custody`, `head`, `core`): it takes what was
seen and the time, and gives the next state and the actions to carry out. Everything that touches the
world is around it (`loop` and the modules that it imports). Nothing here imports the rest of ppdeploy:
these modules are packed into one file for the node (`build`), need only Python >= 3.9 and its standard
library, and never read the wall clock. Design: docs/gang.md.
"""

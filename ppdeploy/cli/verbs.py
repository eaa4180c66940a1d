"""All verbs, in the order of `ppdeploy --help`."""

from __future__ import annotations

from ppdeploy.cli.applying import apply, smoke
from ppdeploy.cli.benching import OnePipeline, bench
from ppdeploy.cli.bundling import bundle
from ppdeploy.cli.checking import check
from ppdeploy.cli.command import app
from ppdeploy.cli.demo import demo
from ppdeploy.cli.docs import docs_variables
from ppdeploy.cli.init import init
from ppdeploy.cli.keys import keys_app
from ppdeploy.cli.lifecycle import restart, start, stop
from ppdeploy.cli.logs import logs
from ppdeploy.cli.net import NetLimit, net
from ppdeploy.cli.options import cluster_verb
from ppdeploy.cli.planning import plan, render
from ppdeploy.cli.pruning import prune
from ppdeploy.cli.rules import rules
from ppdeploy.cli.status import AnyHosts, status
from ppdeploy.lab.cli import lab_app

app.command()(init)
app.command()(plan)
cluster_verb(app, render, limit=None)
app.command()(rules)
app.command()(check)
app.command()(apply)
cluster_verb(app, smoke)
cluster_verb(app, bench, limit=OnePipeline)
cluster_verb(app, status, limit=AnyHosts)
app.command()(logs)
cluster_verb(app, net, limit=NetLimit)
cluster_verb(app, start)
cluster_verb(app, stop)
cluster_verb(app, restart)
app.add_typer(keys_app, name="keys")
cluster_verb(app, prune)
app.command()(bundle)
app.add_typer(lab_app, name="lab")
app.command()(demo)
app.command(hidden=True)(docs_variables)

"""All verbs, in the order of `ppdeploy --help`."""

from __future__ import annotations

from ppdeploy.cli.applying import apply, smoke
from ppdeploy.cli.benching import bench
from ppdeploy.cli.bundling import bundle
from ppdeploy.cli.checking import check
from ppdeploy.cli.command import app
from ppdeploy.cli.demo import demo
from ppdeploy.cli.docs import docs_variables
from ppdeploy.cli.init import init
from ppdeploy.cli.lifecycle import restart, start, stop
from ppdeploy.cli.logs import logs
from ppdeploy.cli.net import net
from ppdeploy.cli.options import cluster_verb
from ppdeploy.cli.planning import plan, render
from ppdeploy.cli.rules import rules
from ppdeploy.cli.status import status
from ppdeploy.lab.cli import lab_app

app.command()(init)
app.command()(plan)
app.command()(render)
app.command()(rules)
app.command()(check)
app.command()(apply)
cluster_verb(app, smoke)
app.command()(bench)
app.command()(status)
app.command()(logs)
app.command()(net)
app.command()(start)
cluster_verb(app, stop)
app.command()(restart)
app.command()(bundle)
app.add_typer(lab_app, name="lab")
app.command()(demo)
app.command(hidden=True)(docs_variables)

"""The page of a run: curves, rollouts, trajectories and times, as one HTML file or served while it writes.

    run folder ──RunFollower──► what is new since a cursor ──write_report──► report.html, without a server
                                                           └─LiveServer────► the page, which asks for more

The page is plain HTML, CSS and JavaScript beside this file. It makes no requests but to this server.
"""

from hybridflow.observability.report.page import LiveServer, collect, write_report

__all__ = ["LiveServer", "collect", "write_report"]

"""The local web UI and the report: the screens of a store, for people to look at.

`_serve.serve` starts the server, `_report.write_report` writes the same screens into one file that
needs no server. Both call the public functions that the commands call.
"""

"""Is every host fit, and every way between two of them?

`examine` asks the hosts and gives `facts`; `diagnose` turns those into verdicts, purely.
"""

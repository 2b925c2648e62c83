"""Is every host fit, and every way between two of them?

`examine` asks the hosts, `facts` is what it finds, `verdicts` judges that, purely.
"""

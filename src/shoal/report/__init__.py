"""What happened: records of a run, the folder they are kept in, what the terminal shows.

Ranks emit `events`; whoever holds the terminal renders them (`terminal`), and the leader keeps
them (`run_folder`).
"""

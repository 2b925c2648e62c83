"""Words the user types become calls. `main` holds the program, a file each for its commands."""

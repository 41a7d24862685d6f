"""What a call would do, without doing it: bad values among its arguments, and a picture."""

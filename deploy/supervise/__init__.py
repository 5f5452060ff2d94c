"""The three processes under supervisord."""

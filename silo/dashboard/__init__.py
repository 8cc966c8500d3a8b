"""The dashboard of a silo: pages in a browser. They show what the services say, with the permissions of the viewer."""

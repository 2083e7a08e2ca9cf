"""One file a format: each turns a path or a hub name into `TaskData`, or names the file and row that is wrong."""

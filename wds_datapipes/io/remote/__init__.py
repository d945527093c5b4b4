"""Reading from web servers, object stores and SFTP: retries, time-outs and range requests."""

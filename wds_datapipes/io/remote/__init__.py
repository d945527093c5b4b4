"""Reading from web servers, object stores and SFTP: retries, timeouts and range requests."""

"""Write the page of launchers, `python -m tests.hosts`, from what `test_launchers` has measured."""

from tests.hosts.page import PAGE, measured, page

if __name__ == "__main__":
    PAGE.write_text(page(measured()))

"""Errors as OpenAI's API has them."""

from collections.abc import Mapping

from kvjax.errors import KvjaxError, without_middle
from kvjax.typing import JsonObject

JSON_TYPE = "application/json"
BUSY = "server_busy"  # the code of errors after which the same request may be sent again
RETRY_SECONDS = 1  # after which it may
MAX_CHARACTERS = 2000  # of an error's message


class ApiError(Exception):
    """An error that is sent to the client.

    Attributes:
      status: of HTTP.
      param: the field that is wrong, or None.
      code: of the API, or None.
      headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        more = {"retry-after": str(RETRY_SECONDS)} if code == BUSY else {}
        self.headers = {"content-type": JSON_TYPE} | more | dict(headers or {})

    @property
    def body(self) -> JsonObject:
        """The JSON of the response."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        # The value may be as long as the body of a request.
        message = without_middle(str(self), MAX_CHARACTERS)
        param = None if self.param is None else without_middle(self.param, MAX_CHARACTERS)
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}


def refused(error: KvjaxError) -> ApiError:
    """Returns the response to a request that the runner has refused."""
    return ApiError(400, str(error), code="invalid_value")


def no_conversation(name: str) -> ApiError:
    """Returns the response to a request of a conversation that is not there."""
    return ApiError(
        404, f"there is no conversation {name!r}. Those that were used least recently are forgotten when there is no "
        "room; begin another one by POST /v1/conversations.", param="conversation", code="conversation_not_found",
    )  # fmt: skip

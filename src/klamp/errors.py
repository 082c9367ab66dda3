"""Everything klamp raises on purpose."""


class KlampError(Exception):
    """Catch this to catch them all."""


class ConfigError(KlampError, ValueError):
    """A setting is out of range, unknown, or contradicts another one."""


class DataError(KlampError, ValueError):
    """A batch cannot mean what the objective needs it to mean."""


class NumericsError(KlampError, ArithmeticError):
    """A computation left the finite numbers, and going on would hide it."""

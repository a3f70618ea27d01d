"""Classes that stand in for mpi4py's own, by whose names programs call them."""

from __future__ import annotations


class StandIn(type):
    """What mpi4py has made itself, or another library, is an instance of the class as well.

    A class names in ``plain`` the one that it stands in for; its subclasses name none.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        plain = cls.__dict__.get("plain")
        return isinstance(instance, plain) if plain else super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        plain = cls.__dict__.get("plain")
        return issubclass(subclass, plain) if plain else super().__subclasscheck__(subclass)

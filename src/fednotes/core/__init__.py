"""Values and services that every other part of fednotes builds on."""

//! kvasir: a local fleet in one process, chat, model, version.

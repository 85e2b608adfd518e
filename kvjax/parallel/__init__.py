"""Several devices: meshes, where arrays lie on one, reductions over slots of all devices, processes, host memory."""

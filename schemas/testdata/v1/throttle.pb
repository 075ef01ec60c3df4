N"$
contractacme	 (08BdemandH
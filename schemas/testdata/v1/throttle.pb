N"(
contractacme	 (08BdemandHPX(08¡

b€¨ø³ï½ì1"synced(ÿ§Ö¹0€‰z8@Jv1Rspool
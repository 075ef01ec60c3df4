
01JDQ7Z9 €Ÿş²ï½ì1*€„ÑÙ‰ï½ì1acmeexport0)@+*4€„ÑÙ‰ï½ì1ĞºĞ»ÑÑ‡export"contract*contract8@2Z
contractcontractacme"acme*enforce0Ôª¨×Æ8j@€€ù…ÔHÀP+X`“hpx
€€„¯_ˆ’lease:_€„ÑÙ‰ï½ì1acmeexport"contract*contract2GET:/report/export/aB198.18.0.0/24H¸R01JDQ7ZA
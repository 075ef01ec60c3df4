-- weir.lua asks weir's check API about a request: http-request lua.weir URL
--
-- What weir refuses is answered here, with weir's status, headers and body. If weir does not answer the request is refused with
-- 503, so that nothing passes unmetered; to let requests pass instead, put `return` in place of the answer marked DOWN.

local function refuse(txn, status, headers, body)
	local reply = txn:reply({ status = status, body = body })
	for name, value in pairs(headers) do
		reply:add_header(name, value)
	end
	txn:done(reply)
end

local handed_on = { ["retry-after"] = true, ["ratelimit-policy"] = true, ["ratelimit"] = true, ["content-type"] = true, ["cache-control"] = true }

core.register_action("weir", { "http-req" }, function(txn, url)
	local headers = {}
	for name, values in pairs(txn.http:req_get_headers()) do
		local list = {}
		for i = 0, #values do -- HAProxy counts from 0
			list[#list + 1] = values[i]
		end
		headers[name] = list
	end
	for _, name in ipairs({ "content-length", "transfer-encoding", "connection", "expect", "upgrade", "te", "x-forwarded-method", "x-forwarded-uri" }) do
		headers[name] = nil
	end
	local forwarded = headers["x-forwarded-for"] or {}
	forwarded[#forwarded + 1] = txn.f:src()
	headers["x-forwarded-for"] = forwarded
	headers["x-original-method"] = { txn.f:method() }
	headers["x-original-uri"] = { txn.f:pathq() }

	local answer = core.httpclient():get({ url = url, headers = headers, timeout = 1000 }) or {}
	local said = {}
	for name, values in pairs(answer.headers or {}) do
		if handed_on[name] then
			said[name] = values[0] or values[1]
		end
	end
	local status = answer.status or 0
	local admitted = status >= 200 and status < 300
	-- HAProxy itself says 503 of a weir that it cannot reach. A refusal of weir's is a problem document.
	if not admitted and said["content-type"] ~= "application/problem+json" then
		refuse(txn, 503, { ["retry-after"] = "5", ["cache-control"] = "no-store", ["content-type"] = "application/problem+json" }, -- DOWN
			'{"type":"about:blank","title":"Service Unavailable","status":503,"detail":"This request cannot be metered right now. Try again in 5 seconds."}')
		return
	end
	if not admitted then
		refuse(txn, status, said, answer.body)
		return
	end
	if said["ratelimit"] then
		txn:set_var("txn.weir_policy", said["ratelimit-policy"])
		txn:set_var("txn.weir_limit", said["ratelimit"])
	end
end, 1)

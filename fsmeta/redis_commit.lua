-- One commit of fsmeta/store.py, atomically. See apply.py for the meaning of each step.
-- KEYS: the rows this client wants to be told about; ARGV[1]: msgpack of the commit.
-- Everything is validated before the first write, since Redis does not undo a failed script.
-- No number above 2^53 may pass through Lua: counters are compared as decimal strings.
-- Returns 0 applied, 1 conflict, 2 fenced, 3 not empty, or the tag of the limit exceeded.
local call, sub = redis.call, string.sub
local fence, worker, sequence, checks, empties, writes = unpack(cmsgpack.unpack(ARGV[1]))

local function above(value, limit)
  if sub(value, 1, 1) == '-' then return false end
  return #value > #limit or (#value == #limit and value > limit)
end

if fence then
  local state = call('HMGET', fence, 'a', worker)
  if not state[1] then return 2 end
  if #writes > 0 and state[2] == sequence then return 0 end
end
for i = 1, #checks, 3 do
  if call('HGET', checks[i], checks[i + 1]) ~= checks[i + 2] then return 1 end
end
for i = 1, #empties do
  if call('EXISTS', empties[i]) == 1 then return 3 end
end

local records, added = {}, {}
for i = 1, #writes do
  local write = writes[i]
  if write[1] == 5 then
    local record = call('HGET', write[2], write[3])
    if not record then
      for j = 1, #added do call('HINCRBY', added[j][2], added[j][3], added[j][7]) end
      return 1
    end
    records[i] = record
  elseif write[1] == 3 then
    call('HINCRBY', write[2], write[3], write[4])
    added[#added + 1] = write
    if write[5] ~= '0' and sub(write[4], 1, 1) ~= '-'
        and above(call('HGET', write[2], write[3]), write[5]) then
      for j = 1, #added do call('HINCRBY', added[j][2], added[j][3], added[j][7]) end
      return write[6]
    end
  end
end

for i = 1, #writes do
  local write = writes[i]
  local op = write[1]
  if op == 0 then
    call('HSET', write[2], write[3], write[4])
  elseif op == 1 then
    call('HDEL', write[2], write[3])
  elseif op == 2 then
    call('UNLINK', write[2])
  elseif op == 4 then
    call('HSET', write[2], write[3], (call('HGET', write[2], write[3]) or '') .. write[4])
  elseif op == 5 then
    local record = records[i]
    for j = 4, #write, 2 do
      local at, value = write[j], write[j + 1]
      if type(value) == 'number' then
        value = struct.pack('>I4', struct.unpack('>I4', record, at + 1) + value)
      end
      record = sub(record, 1, at) .. value .. sub(record, at + #value + 1)
    end
    call('HSET', write[2], write[3], record)
  end
end
if fence and #writes > 0 then call('HSET', fence, worker, sequence) end
-- a row that a client changes is no longer tracked for it, unless the script reads once more
if KEYS[1] then call('EXISTS', KEYS[1]) end
return 0
